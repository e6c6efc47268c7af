-- Counts of a tenant go when there is nothing left that they count.
-- KEYS: files, uploads, jobs (sorted sets), standing batch, then the counts
for i = 1, 4 do
  if redis.call('EXISTS', KEYS[i]) == 1 then
    return 0
  end
end
for i = 5, #KEYS do
  redis.call('UNLINK', KEYS[i])
end
return 1
