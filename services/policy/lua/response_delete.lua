-- A stored response goes, its texts with it, and with them what is remembered under its Idempotency-Key.
-- KEYS: record, parts, index, bytes, input (see idempotency_claim); the same of that key's record, if it has one
-- ARGV: request id, that record's
-- Returns 1, 0 when there is none.
local function forget(at, id)
  if redis.call('HGET', KEYS[at], 'id') ~= id then
    return 0
  end
  for _, name in ipairs({id, id .. ':in'}) do
    local bytes = redis.call('HGET', KEYS[at + 3], name)
    if bytes then
      redis.call('HINCRBY', KEYS[at + 3], 'total', -tonumber(bytes))
      redis.call('HDEL', KEYS[at + 3], name)
    end
  end
  redis.call('DEL', KEYS[at], KEYS[at + 1], KEYS[at + 4])
  redis.call('ZREM', KEYS[at + 2], id)
  return 1
end

local found = forget(1, ARGV[1])
if found == 1 and KEYS[6] then
  forget(6, ARGV[2])
end
return found
