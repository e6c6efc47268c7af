-- What a tenant has used. ARGV: now (0 = server clock), requests per minute, tokens per minute
-- Returns {requests, tokens, held}, the first two as levels, numbers as text. Changes nothing but lets go of old holds.
local state = advance(clock(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]))
save(state)
return {whole(state.requests), whole(state.tokens), whole(state.held)}
