-- An upload begins, unless it did before.
-- KEYS: file, uploads, files
-- ARGV: file id, sealed meta, now (s), most files and uploads (0 = any), when what it tells of was made (us; '' = now)
-- Returns the state: uploading | ready, or full when there are too many
local state = redis.call('HGET', KEYS[1], 'state')
if state then
  return state
end
local most = tonumber(ARGV[4])
if most > 0 and redis.call('ZCARD', KEYS[2]) + redis.call('ZCARD', KEYS[3]) >= most then
  return 'full'
end
local made = ARGV[5]
if made == '' then
  local time = redis.call('TIME')
  made = time[1] .. string.format('%06d', time[2])
end
redis.call('HSET', KEYS[1], 'made_us', made, 'state', 'uploading', 'chunks', 0, 'bytes', 0, 'meta', ARGV[2])
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[1])
return 'uploading'
