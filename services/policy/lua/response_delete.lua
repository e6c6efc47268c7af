-- A stored response goes, its texts with it. KEYS: record, parts, index, bytes, input (see idempotency_claim)
-- ARGV: request id
-- Returns 1, 0 when there is none.
if redis.call('HGET', KEYS[1], 'id') ~= ARGV[1] then
  return 0
end
for _, name in ipairs({ARGV[1], ARGV[1] .. ':in'}) do
  local bytes = redis.call('HGET', KEYS[4], name)
  if bytes then
    redis.call('HINCRBY', KEYS[4], 'total', -tonumber(bytes))
    redis.call('HDEL', KEYS[4], name)
  end
end
redis.call('DEL', KEYS[1], KEYS[2], KEYS[5])
redis.call('ZREM', KEYS[3], ARGV[1])
return 1
