-- quota.reserve. ARGV: now (0 = server clock), requests per minute, tokens per minute, reservation id, tokens, ttl (us),
--       ingress that holds the request ('' = not known), requests at once, key that asks ('' = not known), requests of
--       it at once
-- Returns {reason, retry in us, now in us, and what `told` does}, numbers as text.
local PARALLEL_RETRY_US = 1000000

local function wait(level, need, limit)
  local over = level + need * MINUTE_US - limit * MINUTE_US
  if limit == 0 or over <= 0 then
    return 0
  end
  if need > limit then
    return HELD_RETRY_US
  end
  local rest = math.fmod(over, limit)
  return (over - rest) / limit + (rest > 0 and 1 or 0)
end

local request_limit, token_limit = tonumber(ARGV[2]), tonumber(ARGV[3])
local id, tokens, ttl, ingress = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7]
local parallel_limit, key, key_limit = tonumber(ARGV[8]), ARGV[9], tonumber(ARGV[10])
local now = clock(ARGV[1])
local state = advance(now, request_limit, token_limit)

local function answer(reason, retry)
  save(state)
  return {reason, whole(retry), whole(state.at), unpack(told(state, key, key_limit))}
end

local function hold(count, holder)
  local text = string.gsub(whole(count) .. ' ' .. ingress .. ' ' .. holder, ' +$', '')
  redis.call('HSET', KEYS[2], id, text)
end

local function slot_wait(running, limit)
  return limit > 0 and running >= limit and PARALLEL_RETRY_US or 0
end

local held = redis.call('HGET', KEYS[2], id)
if held then -- perhaps by an ingress that is gone
  hold(tokens_of(held), key_of(held))
  redis.call('ZADD', KEYS[3], whole(state.at + ttl), id)
  return answer('ok', 0)
end
if token_limit > 0 and tokens > token_limit then
  return answer('too_large', 0)
end
local waits = {
  {'requests_per_minute', wait(state.requests, 1, request_limit)},
  {'tokens_per_minute', tokens > 0 and wait(state.tokens, state.held + tokens, token_limit) or 0},
  {'max_parallel', slot_wait(redis.call('HLEN', KEYS[2]), parallel_limit)},
  {'key_max_parallel', key_limit > 0 and slot_wait(running_of(key), key_limit) or 0},
}
local longest = waits[1]
for _, one in ipairs(waits) do
  if one[2] > longest[2] then
    longest = one
  end
end
if longest[2] > 0 then
  return answer(longest[1], longest[2])
end
if request_limit > 0 then
  state.requests = state.requests + MINUTE_US
end
state.held = state.held + tokens
hold(tokens, key)
redis.call('ZADD', KEYS[3], whole(state.at + ttl), id)
return answer('ok', 0)
