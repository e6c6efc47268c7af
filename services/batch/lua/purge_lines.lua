-- Lines of the standing batch go, and with the last one the batch.
-- KEYS: job, origins, ids, refs, tokens, tenant's enqueued tokens, stored (tenant's bytes), bodies, results,
--       then hashes by number, and what else there is of it
-- ARGV: how many of the KEYS from the 8th on are hashes by number, then numbers
-- Returns 1 if the batch went
local last = 7 + tonumber(ARGV[1])
for at = 2, #ARGV do
  local number = ARGV[at]
  local ref = redis.call('HGET', KEYS[4], number)
  if ref then
    local origin, id = string.match(ref, '^(.-) (.*)$')
    redis.call('HDEL', KEYS[2], origin)
    if id ~= '' and redis.call('HGET', KEYS[3], id) == number then
      redis.call('HDEL', KEYS[3], id)
    end
    if redis.call('HEXISTS', KEYS[9], number) == 0 then
      redis.call('HINCRBY', KEYS[1], 'total', -1) -- it waits no more
    end
  end
  redis.call('DECRBY', KEYS[6], redis.call('HGET', KEYS[5], number) or '0')
  redis.call('DECRBY', KEYS[7], redis.call('HSTRLEN', KEYS[8], number) + redis.call('HSTRLEN', KEYS[9], number))
  redis.call('HDEL', KEYS[4], number)
  redis.call('HDEL', KEYS[5], number)
  for i = 8, last do
    redis.call('HDEL', KEYS[i], number)
  end
end
if redis.call('HLEN', KEYS[4]) > 0 then
  return 0
end
local was = redis.call('EXISTS', KEYS[1])
for i = 1, #KEYS do
  if i ~= 6 and i ~= 7 then
    redis.call('UNLINK', KEYS[i])
  end
end
return was
