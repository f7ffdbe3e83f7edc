# item 65: the shell's own way to a network, and the usual tools
# verdict: exited 0; has done
# control: loopback-server.py
(bash -c "echo x > /dev/tcp/127.0.0.1/$HOST_PORT" && echo REACHED) 2>&1
(bash -c 'echo x > /dev/udp/8.8.8.8/53' && echo REACHED) 2>&1
for tool in "curl -m 2 http://127.0.0.1:$HOST_PORT" "wget -T 2 -O - http://1.1.1.1/" "nc -w 2 1.1.1.1 80" "ping -c 1 1.1.1.1" \
  "ssh -o ConnectTimeout=2 localhost" "getent hosts example.com" "git ls-remote https://github.com/a/b"; do
  (timeout 1 $tool > /dev/null && echo "REACHED by $tool") 2> /dev/null
done
echo done
