-- A number in the standing batch for a line, the same one whenever the same message asks again.
-- KEYS: job, origins (hash: origin -> number), ids (hash: hash of custom_id -> number), refs (hash: number -> origin id),
--       results, serial of lines; spec and status are set when the batch is new
-- ARGV: origin (the message's own name), hash of the custom_id or empty, sealed spec
-- The serial outlives the batch, so that no line after a purge has the number, and so the request id, of one before it.
-- Returns {number, 1 if another line had this custom_id}
redis.call('HSETNX', KEYS[1], 'spec', ARGV[3])
redis.call('HSETNX', KEYS[1], 'status', 'in_progress')
local number = redis.call('HGET', KEYS[2], ARGV[1])
if not number then
  local total = redis.call('HINCRBY', KEYS[1], 'total', 1)
  if tonumber(redis.call('GET', KEYS[6]) or '0') < total - 1 then
    redis.call('SET', KEYS[6], total - 1) -- the batch is from before there was a serial
  end
  number = tostring(redis.call('INCR', KEYS[6]))
  redis.call('HSET', KEYS[2], ARGV[1], number)
  redis.call('HSET', KEYS[4], number, ARGV[1] .. ' ' .. ARGV[2])
end
-- What has its result may have given its custom_id back.
if ARGV[2] == '' or redis.call('HEXISTS', KEYS[5], number) == 1 then
  return {tonumber(number), 0}
end
redis.call('HSETNX', KEYS[3], ARGV[2], number)
return {tonumber(number), redis.call('HGET', KEYS[3], ARGV[2]) == number and 0 or 1}
