-- A line that was told to come again later gives its custom_id back.
-- KEYS: ids (hash: hash of custom_id -> number)      ARGV: hash of the custom_id, number
if redis.call('HGET', KEYS[1], ARGV[1]) == ARGV[2] then
  redis.call('HDEL', KEYS[1], ARGV[1])
end
return 1
