def total(:
