-- The next chunk of an upload.
-- KEYS: file (hash: state, chunks, bytes, meta, readers), data (hash: number -> sealed chunk), stored (tenant's bytes),
--       uploads (sorted set: id by last append)
-- ARGV: file id, number, sealed chunk, its bytes unsealed, bytes of a full chunk, most stored bytes (0 = any), now (s)
-- Returns {code, bytes so far}: 1 taken or had already, -1 no such upload, -2 a gap, -3 over the tenant's storage
if redis.call('HGET', KEYS[1], 'state') ~= 'uploading' then
  return {-1, 0}
end
local number, size = tonumber(ARGV[2]), tonumber(ARGV[4])
local found = redis.call('HMGET', KEYS[1], 'chunks', 'bytes')
local chunks, bytes = tonumber(found[1]), tonumber(found[2])
if number < chunks then
  return {1, bytes}
end
-- Nothing follows a short chunk, so that a byte's chunk is known from its offset.
if number > chunks or bytes ~= chunks * tonumber(ARGV[5]) then
  return {-2, bytes}
end
local limit = tonumber(ARGV[6])
if limit > 0 and tonumber(redis.call('GET', KEYS[3]) or '0') + size > limit then
  return {-3, bytes}
end
redis.call('HSET', KEYS[2], ARGV[2], ARGV[3])
redis.call('HINCRBY', KEYS[1], 'chunks', 1)
redis.call('INCRBY', KEYS[3], ARGV[4])
redis.call('ZADD', KEYS[4], ARGV[7], ARGV[1])
return {1, redis.call('HINCRBY', KEYS[1], 'bytes', ARGV[4])}
