# item 6: Node.js, which reserves far more addresses than it uses
# verdict: exited 0; has 55
# limits: memory_bytes=536870912; needs: node
exec node -e 'console.log([...Array(11).keys()].reduce((a, b) => a + b))'
