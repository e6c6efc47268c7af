-- More of a run. KEYS: record, parts, index, bytes, input (see idempotency_claim)
-- ARGV: request id, writer, run, state, life (s), number of the first part, sealed committed tokens, epoch,
--       prompt tokens, completion tokens, most bytes of the tenant's parts, parts ...
-- Returns 1, 2 when the run shall end, 0 when another run has the record, -2 when it is gone, -1 when parts before the
-- first one are missing.
-- A run that was refused before it began, with none before it that may have begun: the record goes. That it is gone is
-- then well, a repeated write finds so. Runs of one owner that never wrote are claims whose answers were lost.
-- Where the parts would be too many bytes, none of this run's are kept: it ends as one without an answer.
local found = redis.call('HMGET', KEYS[1], 'owner', 'run', 'state', 'id', 'unkept', 'cancel')
local state, unkept = ARGV[4], found[5]

if state == 'refused' and found[4] ~= ARGV[1] then
  return 1
end
if found[4] ~= ARGV[1] then
  return -2
end
if found[1] ~= ARGV[2] or found[2] ~= ARGV[3] then
  return 0
end
if found[3] == 'done' then
  return 1
end
local function begun()
  local marks = redis.call('HMGET', KEYS[1], 'epoch', 'moved')
  return marks[1] or marks[2] or redis.call('LLEN', KEYS[5]) > 0
end
if state == 'refused' and ARGV[3] ~= '1' and begun() then
  state = 'open'
end
if state == 'done' and unkept then
  state = 'open'
end
if found[3] ~= 'running' then
  return state == found[3] and 1 or 0
end
if state == 'refused' then
  forget(ARGV[1])
  forget(ARGV[1] .. ':in')
  redis.call('DEL', KEYS[1], KEYS[2], KEYS[5])
  redis.call('ZREM', KEYS[3], ARGV[1])
  return 1
end
local first, held = tonumber(ARGV[6]), redis.call('LLEN', KEYS[2])
if not unkept and held < first then
  return -1
end
local function over(bytes)
  return tonumber(redis.call('HGET', KEYS[4], 'total') or '0') + bytes > tonumber(ARGV[11])
end
if not unkept then
  local bytes = 0
  for i = 12 + held - first, #ARGV do
    bytes = bytes + #ARGV[i]
  end
  if bytes > 0 and over(bytes) then
    sweep()
  end
  if bytes > 0 and over(bytes) then
    forget(ARGV[1])
    redis.call('DEL', KEYS[2])
    redis.call('HSET', KEYS[1], 'unkept', 1)
    state = state == 'done' and 'open' or state
  else
    for i = 12 + held - first, #ARGV do
      redis.call('RPUSH', KEYS[2], ARGV[i])
    end
    redis.call('HINCRBY', KEYS[4], ARGV[1], bytes)
    redis.call('HINCRBY', KEYS[4], 'total', bytes)
  end
end
redis.call('HSET', KEYS[1], 'state', state, 'committed', ARGV[7], 'epoch', ARGV[8],
  'prompt_tokens', ARGV[9], 'completion_tokens', ARGV[10])
redis.call('EXPIRE', KEYS[1], ARGV[5])
redis.call('EXPIRE', KEYS[2], ARGV[5])
if redis.call('TTL', KEYS[4]) < tonumber(ARGV[5]) then -- others are counted there too
  redis.call('EXPIRE', KEYS[4], ARGV[5])
end
redis.call('EXPIRE', KEYS[5], ARGV[5])
redis.call('ZADD', KEYS[3], now + tonumber(ARGV[5]), ARGV[1])
return state == 'running' and found[6] and 2 or 1
