-- A file or upload from before a purge goes.
-- KEYS: file, data, stored (tenant's bytes), then sorted sets that may list it      ARGV: file id, time of the purge (us)
-- Returns 1, or 0 when there is none from before it
local found = redis.call('HMGET', KEYS[1], 'made_us', 'bytes', 'state')
if tonumber(found[1] or '0') >= tonumber(ARGV[2]) then
  return 0
end
redis.call('UNLINK', KEYS[1], KEYS[2])
redis.call('DECRBY', KEYS[3], found[2] or '0')
for i = 4, #KEYS do
  redis.call('ZREM', KEYS[i], ARGV[1])
end
return found[3] and 1 or 0
