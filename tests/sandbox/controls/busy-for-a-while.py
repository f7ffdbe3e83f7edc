# item 13: computes for less than it may
# verdict: exited 0; has 333383335000
print(sum(number * number for number in range(10001)))
