-- Take or renew a lease. KEYS: lease      ARGV: owner, time to live (ms)      Returns 1, or 0 while another holds it
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then
  return 0
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
