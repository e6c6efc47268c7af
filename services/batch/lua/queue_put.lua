-- The body of a line of the standing batch, once; its prompt tokens count as enqueued.
-- KEYS: job, bodies, results, tokens, tenant's enqueued tokens, stored (tenant's bytes), refs
-- ARGV: number, sealed body, prompt tokens, most enqueued tokens (0 = any), most bodies (0 = any), most stored bytes
--       (0 = any)
-- Returns 1, 0 when it has a result already or a purge took its number, -1 when the tokens are over the limit, -2 when the lines are, -3 when the
-- bytes are
local number, tokens, limit, lines = ARGV[1], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
if redis.call('HEXISTS', KEYS[3], number) == 1 or redis.call('HEXISTS', KEYS[7], number) == 0 then
  return 0
end
if redis.call('HEXISTS', KEYS[2], number) == 1 then
  return 1
end
if limit > 0 and tonumber(redis.call('GET', KEYS[5]) or '0') + tokens > limit then
  return -1
end
if lines > 0 and redis.call('HLEN', KEYS[2]) >= lines then
  return -2
end
local size, stored = #ARGV[2], tonumber(ARGV[6])
if stored > 0 and tonumber(redis.call('GET', KEYS[6]) or '0') + size > stored then
  return -3
end
redis.call('INCRBY', KEYS[6], size)
redis.call('HSET', KEYS[2], number, ARGV[2])
redis.call('HSET', KEYS[4], number, ARGV[3])
redis.call('INCRBY', KEYS[5], ARGV[3])
return 1
