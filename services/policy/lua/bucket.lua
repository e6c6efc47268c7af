-- Head of reserve.lua, release.lua and settle.lua: one tenant's quota, as in quota.py.
-- KEYS[1] bucket: hash of requests, tokens (levels), at (microseconds), held (sum of holds)
-- KEYS[2] holds: hash of reservation id -> 'tokens ingress key': who holds the request and which key asked for it, each
--         empty if that is not known; what is empty at the end is left out
-- KEYS[3] expiry: sorted set of reservation id by expiry
local MINUTE_US = 60000000
local MAX_LEVEL = 9000000000000000
local HELD_RETRY_US = 5000000

local function tokens_of(hold)
  return tonumber(string.match(hold, '^%d+'))
end

local function key_of(hold)
  return string.match(hold, '^%d+ [^ ]* (.*)$') or ''
end

-- How many requests of a key run. Read from the holds: a count kept beside them could drift.
local function running_of(key)
  local count = 0
  if key ~= '' then
    for _, hold in ipairs(redis.call('HVALS', KEYS[2])) do
      if key_of(hold) == key then
        count = count + 1
      end
    end
  end
  return count
end

local function whole(number)
  return string.format('%.0f', number)
end

-- The server's own clock; a test passes its own.
local function clock(given)
  if given ~= '0' then
    return tonumber(given)
  end
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

local function drained(level, limit, elapsed)
  if limit == 0 then
    return 0
  end
  return math.max(0, level - limit * elapsed)
end

local function advance(now, request_limit, token_limit)
  local found = redis.call('HMGET', KEYS[1], 'requests', 'tokens', 'at', 'held')
  local at = tonumber(found[3] or '0')
  now = math.max(now, at)
  local state = {
    requests = drained(tonumber(found[1] or '0'), request_limit, now - at),
    tokens = drained(tonumber(found[2] or '0'), token_limit, now - at),
    at = now,
    held = tonumber(found[4] or '0'),
  }
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', whole(now))) do
    state.held = state.held - tokens_of(redis.call('HGET', KEYS[2], id) or '0')
    redis.call('HDEL', KEYS[2], id)
    redis.call('ZREM', KEYS[3], id)
  end
  return state
end

local function release(state, id)
  local held = redis.call('HGET', KEYS[2], id)
  if held then
    state.held = state.held - tokens_of(held)
    redis.call('HDEL', KEYS[2], id)
    redis.call('ZREM', KEYS[3], id)
  end
end

-- {requests, tokens, held, running of the tenant, running of the key, 0 if that has no limit}, as answers tell it
local function told(state, key, key_limit)
  return {whole(state.requests), whole(state.tokens), whole(state.held), whole(redis.call('HLEN', KEYS[2])),
    whole(key_limit > 0 and running_of(key) or 0)}
end

local function save(state)
  redis.call('HSET', KEYS[1], 'requests', whole(state.requests), 'tokens', whole(state.tokens),
    'at', whole(state.at), 'held', whole(state.held))
end
