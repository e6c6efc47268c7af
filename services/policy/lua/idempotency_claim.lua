-- The record of an Idempotency-Key: made, taken over, or only looked at.
-- KEYS: record (hash), parts (list), index (sorted set: request id by expiry), bytes (hash: of parts, by request id,
--       and in total), input (list: what a stored response is made from)
-- ARGV: request id if this makes it, mark of the body, asker, seed, life (s), ingress that is known to be lost
--       ('' = none), 1 to make none, known run, known parts, most parts to answer, most records of the tenant,
--       most bytes of the tenant with which a record is made ('' = any), record that goes with this one ('' = none)
-- Returns {outcome, run, owner, seed, created (s), sealed committed tokens, number of parts, request id, parts ...}
local found = redis.call('HMGET', KEYS[1], 'body', 'state', 'owner')

local function record(outcome)
  local is = redis.call('HMGET', KEYS[1], 'run', 'owner', 'seed', 'created', 'committed', 'id')
  local first = is[1] == ARGV[8] and tonumber(ARGV[9]) or 0
  local answer = {outcome, is[1], is[2], is[3], is[4], is[5] or '', tostring(redis.call('LLEN', KEYS[2])), is[6]}
  for _, part in ipairs(redis.call('LRANGE', KEYS[2], first, first + tonumber(ARGV[10]) - 1)) do
    answer[#answer + 1] = part
  end
  return answer
end

local function take()
  forget(redis.call('HGET', KEYS[1], 'id'))
  redis.call('DEL', KEYS[2])
  redis.call('HDEL', KEYS[1], 'unkept')
  if found[3] and found[3] ~= ARGV[3] then
    redis.call('HSET', KEYS[1], 'moved', 1) -- what the owner before began nobody knows here
  end
  redis.call('HSET', KEYS[1], 'state', 'running', 'owner', ARGV[3])
  redis.call('HINCRBY', KEYS[1], 'run', 1)
  redis.call('EXPIRE', KEYS[1], ARGV[5])
  redis.call('EXPIRE', KEYS[5], ARGV[5])
  redis.call('ZADD', KEYS[3], now + tonumber(ARGV[5]), redis.call('HGET', KEYS[1], 'id'))
  return record('yours')
end

if not found[1] then
  if ARGV[7] == '1' then
    return {'missing'}
  end
  sweep()
  if redis.call('ZCARD', KEYS[3]) >= tonumber(ARGV[11]) then
    return {'full'}
  end
  if ARGV[12] ~= '' and tonumber(redis.call('HGET', KEYS[4], 'total') or '0') >= tonumber(ARGV[12]) then
    return {'over'}
  end
  redis.call('HSET', KEYS[1], 'id', ARGV[1], 'body', ARGV[2], 'seed', ARGV[4], 'created', now, 'keyed', ARGV[13])
  return take()
end
if found[1] ~= ARGV[2] then
  return {'other_body'}
end
if found[2] == 'done' then
  return record('done')
end
-- An owner that asks again does not know of its run: the answer to its claim was lost.
if found[2] == 'running' and found[3] ~= ARGV[3] and found[3] ~= ARGV[6] then
  return record('running')
end
return take()
