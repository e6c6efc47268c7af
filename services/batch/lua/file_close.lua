-- An upload becomes a file.
-- KEYS: file, uploads, files (sorted set: id by serial), files of its purpose, expiry (sorted set: id by expiry), serial
-- ARGV: file id, expiry (s; 0 = none), sealed meta
-- Returns 1, or 0 when there is no such upload. Safe to repeat.
local state = redis.call('HGET', KEYS[1], 'state')
if state == 'ready' then
  return 1
end
if state ~= 'uploading' then
  return 0
end
local serial = redis.call('INCR', KEYS[6])
redis.call('HSET', KEYS[1], 'state', 'ready', 'meta', ARGV[3])
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZADD', KEYS[3], serial, ARGV[1])
redis.call('ZADD', KEYS[4], serial, ARGV[1])
if ARGV[2] ~= '0' then
  redis.call('ZADD', KEYS[5], ARGV[2], ARGV[1])
end
return 1
