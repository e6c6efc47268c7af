-- An executor takes an item: its epoch rises, unless there is nothing to run.
-- KEYS: job, bodies, results, epochs, lost, settles      ARGV: number
-- Returns {status, epoch, 1 if it has a result, body, settlement not yet published, times lost}
local number = ARGV[1]
local status = redis.call('HGET', KEYS[1], 'status') or ''
local settle = redis.call('HGET', KEYS[6], number) or ''
local done = redis.call('HEXISTS', KEYS[3], number)
local lost = tonumber(redis.call('HGET', KEYS[5], number) or '0')
local body = redis.call('HGET', KEYS[2], number) or ''
if status ~= 'in_progress' or done == 1 or body == '' then
  return {status, tonumber(redis.call('HGET', KEYS[4], number) or '0'), done, '', settle, lost}
end
redis.call('HINCRBY', KEYS[1], 'claims', 1)
return {status, redis.call('HINCRBY', KEYS[4], number, 1), 0, body, settle, lost}
