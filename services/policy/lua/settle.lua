-- ledger.apply and quota.settle in one step.
-- KEYS[4] ledger row: hash      KEYS[5] usage: hash of the tenant's sums
-- ARGV: now (0 = server clock), requests per minute, tokens per minute, reservation id, row life (s),
--       epoch, prompt tokens, completion tokens, cached tokens, finish,
--       then per compute row: name, account as text, computed tokens, wasted tokens, seconds
-- An empty reservation id: the request took nothing from the limits a minute, and its bucket is left alone.
-- Returns {1 if the totals were taken else 0, change of tokens, compute rows taken}, numbers as text.
local request_limit, token_limit = tonumber(ARGV[2]), tonumber(ARGV[3])
local metered = ARGV[4] ~= ''
local state = metered and advance(clock(ARGV[1]), request_limit, token_limit) or {at = clock(ARGV[1])}
local row, usage = KEYS[4], KEYS[5]

-- A higher epoch replaces the totals; an equal or lower one changes nothing.
local function take_totals()
  local old = redis.call('HMGET', row, 'epoch', 'prompt_tokens', 'completion_tokens', 'cached_tokens')
  local epoch = tonumber(ARGV[6])
  if old[1] and epoch <= tonumber(old[1]) then
    return 0, 0
  end
  local prompt, completion = tonumber(ARGV[7]), tonumber(ARGV[8])
  local prompt_change = prompt - tonumber(old[2] or '0')
  local completion_change = completion - tonumber(old[3] or '0')
  redis.call('HSET', row, 'epoch', ARGV[6], 'prompt_tokens', ARGV[7], 'completion_tokens', ARGV[8],
    'cached_tokens', ARGV[9], 'finish', ARGV[10], 'settled_us', whole(state.at))
  redis.call('HINCRBY', usage, 'prompt_tokens', whole(prompt_change))
  redis.call('HINCRBY', usage, 'completion_tokens', whole(completion_change))
  redis.call('HINCRBY', usage, 'cached_tokens', whole(tonumber(ARGV[9]) - tonumber(old[4] or '0')))
  if not old[1] then
    redis.call('HINCRBY', usage, 'requests', '1')
  end
  return 1, prompt_change + completion_change
end

-- One row per (attempt, worker): the first account of it counts, so a redelivery adds nothing.
local function take_compute()
  local taken = 0
  for i = 11, #ARGV, 5 do
    if redis.call('HSETNX', row, 'compute:' .. ARGV[i], ARGV[i + 1]) == 1 then
      redis.call('HINCRBY', usage, 'computed_tokens', ARGV[i + 2])
      redis.call('HINCRBY', usage, 'wasted_tokens', ARGV[i + 3])
      redis.call('HINCRBYFLOAT', usage, 'compute_s', ARGV[i + 4])
      taken = taken + 1
    end
  end
  return taken
end

if metered then
  release(state, ARGV[4])
end
local replaced, change = take_totals()
local computed = take_compute()
redis.call('EXPIRE', row, ARGV[5])
if metered then
  if token_limit > 0 then
    state.tokens = math.min(MAX_LEVEL, math.max(0, state.tokens + change * MINUTE_US))
  end
  save(state)
end
return {whole(replaced), whole(change), whole(computed)}
