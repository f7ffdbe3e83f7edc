# item 14: four subprocesses at once, read as they write
# verdict: exited 0; has ['0', '1', '2', '3']
import asyncio


async def echo(number):
    process = await asyncio.create_subprocess_exec("sh", "-c", f"echo {number}", stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    return output.decode().strip()


async def main():
    print(await asyncio.gather(*map(echo, range(4))))


asyncio.run(main())
