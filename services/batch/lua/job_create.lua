-- A batch begins over a file, which may not be deleted from now on.
-- KEYS: job, input file, jobs (sorted set: id by serial), active (set), serial
-- ARGV: batch id, sealed spec, status
-- Returns 1, or 0 when the file is gone
if redis.call('HGET', KEYS[2], 'state') ~= 'ready' then
  return 0
end
redis.call('HINCRBY', KEYS[2], 'readers', 1)
redis.call('HSET', KEYS[1], 'spec', ARGV[2], 'status', ARGV[3])
redis.call('ZADD', KEYS[3], redis.call('INCR', KEYS[5]), ARGV[1])
redis.call('SADD', KEYS[4], ARGV[1])
return 1
