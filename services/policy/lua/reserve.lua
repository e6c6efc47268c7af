-- quota.reserve. ARGV: now (0 = server clock), requests per minute, tokens per minute, reservation id, tokens, ttl (us),
--       ingress that holds the request ('' = not known)
-- Returns {reason, retry in us, now in us, requests, tokens, held}, numbers as text; of the last three the first two are
-- levels.
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
local now = clock(ARGV[1])
local state = advance(now, request_limit, token_limit)

local function answer(reason, retry)
  save(state)
  return {reason, whole(retry), whole(state.at), whole(state.requests), whole(state.tokens), whole(state.held)}
end

local function hold(count)
  redis.call('HSET', KEYS[2], id, ingress == '' and whole(count) or whole(count) .. ' ' .. ingress)
end

local held = redis.call('HGET', KEYS[2], id)
if held then -- perhaps by an ingress that is gone
  hold(tokens_of(held))
  redis.call('ZADD', KEYS[3], whole(state.at + ttl), id)
  return answer('ok', 0)
end
if token_limit > 0 and tokens > token_limit then
  return answer('too_large', 0)
end
local request_wait = wait(state.requests, 1, request_limit)
local token_wait = wait(state.tokens, state.held + tokens, token_limit)
if request_wait > 0 or token_wait > 0 then
  local reason = request_wait >= token_wait and 'requests_per_minute' or 'tokens_per_minute'
  return answer(reason, math.max(request_wait, token_wait))
end
if request_limit > 0 then
  state.requests = state.requests + MINUTE_US
end
state.held = state.held + tokens
hold(tokens)
redis.call('ZADD', KEYS[3], whole(state.at + ttl), id)
return answer('ok', 0)
