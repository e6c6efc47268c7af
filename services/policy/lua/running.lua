-- How many requests of each key run. ARGV: now (0 = server clock)
-- Returns {key, count, ...}; '' stands for requests of which no key is known. Changes nothing.
local counts, answer = {}, {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '(' .. whole(clock(ARGV[1])), '+inf')) do
  local key = key_of(redis.call('HGET', KEYS[2], id) or '')
  counts[key] = (counts[key] or 0) + 1
end
for key, count in pairs(counts) do
  answer[#answer + 1] = key
  answer[#answer + 1] = whole(count)
end
return answer
