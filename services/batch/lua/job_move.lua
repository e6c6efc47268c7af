-- A batch changes its state, if it is still in the state the caller decided on.
-- KEYS: job, active, tenant's enqueued tokens, input file, bodies, results, tokens, epochs, lost,
--       stored (tenant's bytes)
-- ARGV: batch id, status it must have, 1 if it ends here else 0, tokens it enqueues, most enqueued tokens (0 = any),
--       then field, value, ...
-- Returns 1, 0 when it is in another state, -1 when its tokens are over the limit
if redis.call('HGET', KEYS[1], 'status') ~= ARGV[2] then
  return 0
end
local tokens, limit = tonumber(ARGV[4]), tonumber(ARGV[5])
if limit > 0 and tonumber(redis.call('GET', KEYS[3]) or '0') + tokens > limit then
  return -1
end
if tokens > 0 then
  redis.call('INCRBY', KEYS[3], ARGV[4])
end
for i = 6, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
end
if ARGV[3] == '1' then
  redis.call('SREM', KEYS[2], ARGV[1])
  if redis.call('EXISTS', KEYS[4]) == 1 then
    redis.call('HINCRBY', KEYS[4], 'readers', -1)
  end
  redis.call('DECRBY', KEYS[10], redis.call('HGET', KEYS[1], 'held_bytes') or '0')
  redis.call('HDEL', KEYS[1], 'held_bytes')
  redis.call('UNLINK', KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[9])
end
return 1
