-- A batch from before a purge goes.
-- KEYS: job, tokens (hash: number -> prompt tokens), tenant's enqueued tokens, stored (tenant's bytes),
--       jobs (sorted set), active (set), then what else there is of it
-- ARGV: batch id, time of the purge (us)
-- Returns 1, or 0 when there is none from before it
local found = redis.call('HMGET', KEYS[1], 'made_us', 'held_bytes', 'spec')
if tonumber(found[1] or '0') >= tonumber(ARGV[2]) then
  return 0
end
for _, tokens in ipairs(redis.call('HVALS', KEYS[2])) do
  redis.call('DECRBY', KEYS[3], tokens)
end
redis.call('DECRBY', KEYS[4], found[2] or '0')
redis.call('ZREM', KEYS[5], ARGV[1])
redis.call('SREM', KEYS[6], ARGV[1])
redis.call('UNLINK', KEYS[1], KEYS[2])
for i = 7, #KEYS do
  redis.call('UNLINK', KEYS[i])
end
return found[3] and 1 or 0
