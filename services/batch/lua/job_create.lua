-- A batch begins over a file, which may not be deleted from now on.
-- Its lines are kept once more until it ends, so the file's bytes count twice until then.
-- KEYS: job, input file, jobs (sorted set: id by serial), active (set), serial, stored (tenant's bytes)
-- ARGV: batch id, sealed spec, status, most stored bytes (0 = any), most batches that have not ended (0 = any)
-- Returns 1, also when the batch is there already; 0 when the file is gone, -1 when it would be over the tenant's
-- storage, -2 when there are too many
if redis.call('HEXISTS', KEYS[1], 'spec') == 1 then
  return 1
end
if redis.call('HGET', KEYS[2], 'state') ~= 'ready' then
  return 0
end
local limit, most = tonumber(ARGV[4]), tonumber(ARGV[5])
if most > 0 and redis.call('SCARD', KEYS[4]) >= most then
  return -2
end
local size = redis.call('HGET', KEYS[2], 'bytes')
if limit > 0 and tonumber(redis.call('GET', KEYS[6]) or '0') + tonumber(size) > limit then
  return -1
end
redis.call('INCRBY', KEYS[6], size)
redis.call('HINCRBY', KEYS[2], 'readers', 1)
local time = redis.call('TIME')
local made = time[1] .. string.format('%06d', time[2])
redis.call('HSET', KEYS[1], 'spec', ARGV[2], 'status', ARGV[3], 'held_bytes', size, 'made_us', made)
redis.call('ZADD', KEYS[3], redis.call('INCR', KEYS[5]), ARGV[1])
redis.call('SADD', KEYS[4], ARGV[1])
return 1
