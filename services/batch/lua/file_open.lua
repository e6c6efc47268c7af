-- An upload begins, unless it did before.
-- KEYS: file, uploads      ARGV: file id, sealed meta, now (s)
-- Returns the state: uploading | ready
local state = redis.call('HGET', KEYS[1], 'state')
if state then
  return state
end
redis.call('HSET', KEYS[1], 'state', 'uploading', 'chunks', 0, 'bytes', 0, 'meta', ARGV[2])
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[1])
return 'uploading'
