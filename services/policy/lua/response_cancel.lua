-- A stored response shall end; one that has ended stays as it is. KEYS: record. ARGV: request id
-- Returns 1, 0 when there is none.
local found = redis.call('HMGET', KEYS[1], 'id', 'state')
if found[1] ~= ARGV[1] then
  return 0
end
if found[2] ~= 'done' then
  redis.call('HSET', KEYS[1], 'cancel', 1)
end
return 1
