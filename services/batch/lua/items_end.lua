-- A result for items that have none, of the batch's own making: no run is billed for them.
-- KEYS: job, bodies, results, tokens, tenant's enqueued tokens
-- ARGV: status the batch must have, then number, sealed result, ...
-- Returns 1, or 0 when the batch is in another state
if redis.call('HGET', KEYS[1], 'status') ~= ARGV[1] then
  return 0
end
for i = 2, #ARGV, 2 do
  if redis.call('HSETNX', KEYS[3], ARGV[i], ARGV[i + 1]) == 1 then
    redis.call('HINCRBY', KEYS[1], 'failed', 1)
    redis.call('HDEL', KEYS[2], ARGV[i])
    local tokens = redis.call('HGET', KEYS[4], ARGV[i])
    if tokens then
      redis.call('HDEL', KEYS[4], ARGV[i])
      redis.call('DECRBY', KEYS[5], tokens)
    end
  end
end
return 1
