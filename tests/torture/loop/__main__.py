"""python -m tests.torture.loop"""

from tests.torture.loop.search import main

if __name__ == "__main__":
    main()
