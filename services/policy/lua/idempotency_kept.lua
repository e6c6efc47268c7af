-- Before claim and write: what a tenant keeps is counted in bytes, and what is over its time goes from the count.
-- KEYS[3], KEYS[4]: index, bytes (see idempotency_claim)
local now = tonumber(redis.call('TIME')[1])

local function forget(id)
  local bytes = redis.call('HGET', KEYS[4], id)
  if bytes then
    redis.call('HINCRBY', KEYS[4], 'total', -tonumber(bytes))
    redis.call('HDEL', KEYS[4], id)
  end
end

local function sweep()
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now)) do
    forget(id)
    forget(id .. ':in')
  end
  redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now)
end

