-- Bodies of items, while their batch takes some.
-- KEYS: job, bodies, tokens (hash: number -> prompt tokens)
-- ARGV: status the batch must have, then number, sealed body, prompt tokens, ...
-- Returns 1, or 0 when the batch is in another state
if redis.call('HGET', KEYS[1], 'status') ~= ARGV[1] then
  return 0
end
for i = 2, #ARGV, 3 do
  redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1])
  redis.call('HSET', KEYS[3], ARGV[i], ARGV[i + 2])
end
return 1
