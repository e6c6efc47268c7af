-- A file, or an upload that is given up, goes.
-- KEYS: file, data, stored, uploads, files, files of its purpose, expiry
-- ARGV: file id, state it must be in (uploading | ready)
-- Returns 1, 0 when there is no such file, -1 while a batch reads it
local found = redis.call('HMGET', KEYS[1], 'state', 'bytes', 'readers')
if found[1] ~= ARGV[2] then
  return 0
end
if tonumber(found[3] or '0') > 0 then
  return -1
end
redis.call('UNLINK', KEYS[1], KEYS[2])
redis.call('DECRBY', KEYS[3], found[2])
for i = 4, 7 do
  redis.call('ZREM', KEYS[i], ARGV[1])
end
return 1
