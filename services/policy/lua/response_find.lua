-- A stored response as it is. KEYS: record, parts, index, bytes, input (see idempotency_claim)
-- ARGV: request id, known run, known parts (-1: none are asked for), most parts to answer, 1 for the last
--       parts instead of those behind the known ones, known input (-1: none is asked for)
-- Returns nothing when there is none, else {owner, state, run, completion tokens, cancel, number of parts, number of
-- input parts, number of the first part, {parts}, {input}}
local is = redis.call('HMGET', KEYS[1], 'id', 'owner', 'state', 'run', 'completion_tokens', 'cancel')
if is[1] ~= ARGV[1] then
  return false
end
local most, held, given = tonumber(ARGV[4]), redis.call('LLEN', KEYS[2]), redis.call('LLEN', KEYS[5])
local first = is[4] == ARGV[2] and tonumber(ARGV[3]) or 0
if ARGV[5] == '1' then
  first = math.max(0, held - most)
end
local input, from = {}, tonumber(ARGV[6])
if from >= 0 then
  input = redis.call('LRANGE', KEYS[5], from, from + most - 1)
end
local parts = {}
if tonumber(ARGV[3]) >= 0 then
  parts = redis.call('LRANGE', KEYS[2], first, first + most - 1)
end
return {is[2], is[3], is[4], is[5] or '0', is[6] or '', held, given, first, parts, input}
