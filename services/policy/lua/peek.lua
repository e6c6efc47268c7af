-- What a tenant has used. ARGV: now (0 = server clock), requests per minute, tokens per minute, key that asks, requests of
--       it at once (0 = no limit)
-- Returns what `told` does, the first two as levels, numbers as text. Changes nothing but lets go of old holds.
local state = advance(clock(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]))
save(state)
return told(state, ARGV[4], tonumber(ARGV[5]))
