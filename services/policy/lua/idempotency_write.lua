-- More of a run. KEYS: record, parts, index
-- ARGV: request id, writer, run, state, life (s), number of the first part, sealed committed tokens, epoch,
--       prompt tokens, completion tokens, parts ...
-- Returns 1, 0 when another run has the record or it is gone, -1 when parts before the first one are missing.
-- A first run that was refused before it began: the record goes. That it is gone is then well, a repeated write finds so.
local found = redis.call('HMGET', KEYS[1], 'owner', 'run', 'state', 'id')
local state = ARGV[4]
if state == 'refused' and found[4] ~= ARGV[1] then
  return 1
end
if found[1] ~= ARGV[2] or found[2] ~= ARGV[3] or found[4] ~= ARGV[1] then
  return 0
end
if found[3] == 'done' then
  return 1
end
if state == 'refused' and ARGV[3] ~= '1' then
  state = 'open'
end
if found[3] ~= 'running' then
  return state == found[3] and 1 or 0
end
if state == 'refused' then
  redis.call('DEL', KEYS[1], KEYS[2])
  redis.call('ZREM', KEYS[3], ARGV[1])
  return 1
end
local first, held = tonumber(ARGV[6]), redis.call('LLEN', KEYS[2])
if held < first then
  return -1
end
for i = 11 + held - first, #ARGV do
  redis.call('RPUSH', KEYS[2], ARGV[i])
end
redis.call('HSET', KEYS[1], 'state', state, 'committed', ARGV[7], 'epoch', ARGV[8],
  'prompt_tokens', ARGV[9], 'completion_tokens', ARGV[10])
redis.call('EXPIRE', KEYS[1], ARGV[5])
redis.call('EXPIRE', KEYS[2], ARGV[5])
redis.call('ZADD', KEYS[3], tonumber(redis.call('TIME')[1]) + tonumber(ARGV[5]), ARGV[1])
return 1
