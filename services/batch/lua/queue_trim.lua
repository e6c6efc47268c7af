-- Old results of the standing batch go, with everything that names them.
-- KEYS: finished (stream), results, origins, ids, refs, epochs, lost, stored (tenant's bytes)
-- ARGV: oldest stream id kept, most to remove, most kept
-- Returns how many went
local most, excess = tonumber(ARGV[2]), redis.call('XLEN', KEYS[1]) - tonumber(ARGV[3])
local entries
if excess > 0 then
  entries = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', math.min(most, excess))
else
  entries = redis.call('XRANGE', KEYS[1], '-', '(' .. ARGV[1], 'COUNT', most)
end
for _, entry in ipairs(entries) do
  local number = entry[2][2]
  local ref = redis.call('HGET', KEYS[5], number)
  if ref then
    local origin, id = string.match(ref, '^(.-) (.*)$')
    redis.call('HDEL', KEYS[3], origin)
    -- The custom_id may belong to another line, of which this one was a duplicate.
    if id ~= '' and redis.call('HGET', KEYS[4], id) == number then
      redis.call('HDEL', KEYS[4], id)
    end
  end
  redis.call('DECRBY', KEYS[8], redis.call('HSTRLEN', KEYS[2], number))
  for _, key in ipairs({KEYS[2], KEYS[5], KEYS[6], KEYS[7]}) do
    redis.call('HDEL', key, number)
  end
  redis.call('XDEL', KEYS[1], entry[1])
end
return #entries
