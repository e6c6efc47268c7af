-- More of what a stored response is made from.
-- KEYS: record, parts, index, bytes, input (see idempotency_claim)
-- ARGV: request id, writer, run, life (s), number of the first part, parts ...
-- Returns 1, 0 when another run has the record or it is gone, -1 when parts before the first one are missing.
-- Of one that has ended all of it is here, and lives as long as the rest.
local found = redis.call('HMGET', KEYS[1], 'id', 'owner', 'run', 'state')
if found[1] ~= ARGV[1] or found[2] ~= ARGV[2] or found[3] ~= ARGV[3] then
  return 0
end
if found[4] == 'done' then
  return 1
end
local first, held = tonumber(ARGV[5]), redis.call('LLEN', KEYS[5])
if held < first then
  return -1
end
local bytes = 0
for i = 6 + held - first, #ARGV do
  redis.call('RPUSH', KEYS[5], ARGV[i])
  bytes = bytes + #ARGV[i]
end
redis.call('HINCRBY', KEYS[4], ARGV[1] .. ':in', bytes)
redis.call('HINCRBY', KEYS[4], 'total', bytes)
if redis.call('TTL', KEYS[4]) < tonumber(ARGV[4]) then -- others are counted there too
  redis.call('EXPIRE', KEYS[4], ARGV[4])
end
redis.call('EXPIRE', KEYS[5], ARGV[4])
return 1
