-- The result of an item, written once; the batch's counts change with it.
-- KEYS: job, bodies, results, epochs, settles, tokens, tenant's enqueued tokens, finished (stream; of the standing
--       batch), stored (tenant's bytes), refs (of the standing batch)
-- ARGV: number, epoch of the run (0 = the batch's own word), sealed result, sealed settlement or empty,
--       completed (1 | 0), prompt, cached, completion tokens, 1 if finished items are listed, life of settlements (s)
-- Returns {code, items without result}: stored | exists | fenced | ended
local number = ARGV[1]
local found = redis.call('HMGET', KEYS[1], 'status', 'total', 'completed', 'failed')
local status = found[1]
local left = tonumber(found[2] or '0') - tonumber(found[3] or '0') - tonumber(found[4] or '0')
if status ~= 'in_progress' and status ~= 'finalizing' and status ~= 'cancelling' then
  return {'ended', 0}
end
if ARGV[9] == '1' and redis.call('HEXISTS', KEYS[10], number) == 0 then
  return {'ended', left} -- a purge took the line
end
if redis.call('HEXISTS', KEYS[3], number) == 1 then
  return {'exists', left}
end
if ARGV[2] ~= '0' and redis.call('HGET', KEYS[4], number) ~= ARGV[2] then
  return {'fenced', left}
end
if ARGV[9] == '1' then
  -- A batch's lines are counted as a whole, when it begins and ends.
  redis.call('INCRBY', KEYS[9], #ARGV[3] - redis.call('HSTRLEN', KEYS[2], number))
end
redis.call('HSET', KEYS[3], number, ARGV[3])
redis.call('HDEL', KEYS[2], number)
if ARGV[4] ~= '' then
  redis.call('HSET', KEYS[5], number, ARGV[4])
  redis.call('EXPIRE', KEYS[5], ARGV[10])
end
redis.call('HINCRBY', KEYS[1], ARGV[5] == '1' and 'completed' or 'failed', 1)
for i, name in ipairs({'prompt_tokens', 'cached_tokens', 'completion_tokens'}) do
  redis.call('HINCRBY', KEYS[1], name, ARGV[5 + i])
end
local tokens = redis.call('HGET', KEYS[6], number)
if tokens then
  redis.call('HDEL', KEYS[6], number)
  redis.call('DECRBY', KEYS[7], tokens)
end
if ARGV[9] == '1' then
  redis.call('XADD', KEYS[8], '*', 'number', number)
end
return {'stored', left - 1}
