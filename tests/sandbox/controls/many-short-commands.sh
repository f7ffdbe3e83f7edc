# item 33: two hundred commands that take less than a moment each, eight at a time
# verdict: exited 0; has 200
seq 200 | xargs -P 8 -n 10 sh -c 'for number in "$@"; do sh -c "echo $number"; done' run | wc -l
