# item 12: a file with a hole
# verdict: exited 0; has 7 MiB
with open("sparse", "wb") as file:
    file.truncate(7 << 20)
    file.seek(1 << 20)
    file.write(b"x")
print(len(open("sparse", "rb").read()) >> 20, "MiB")
