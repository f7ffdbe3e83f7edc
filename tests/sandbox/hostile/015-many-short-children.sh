# item 15: computes in children that each end after a few milliseconds
# verdict: cpu_timeout
# control: busy-for-a-while.py; limits: cpu_seconds=0.5
while :; do
  sh -c 'i=0; while [ $i -lt 2000 ]; do i=$((i+1)); done'
done
