-- Old results of the standing batch go, with everything that names them.
-- KEYS: finished (stream), results, origins, ids, refs, epochs, lost      ARGV: oldest stream id kept, most to remove
-- Returns how many went
local entries = redis.call('XRANGE', KEYS[1], '-', '(' .. ARGV[1], 'COUNT', ARGV[2])
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
  for _, key in ipairs({KEYS[2], KEYS[5], KEYS[6], KEYS[7]}) do
    redis.call('HDEL', key, number)
  end
  redis.call('XDEL', KEYS[1], entry[1])
end
return #entries
