-- Let go of a hold whose request never ran. ARGV: now (0 = server clock), requests per minute, tokens per minute, id
local state = advance(clock(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]))
release(state, ARGV[4])
save(state)
return 1
