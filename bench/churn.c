/* A program that lives of malloc: blocks of 16 bytes to 64 KiB, freed and allocated at random.
 *
 * For every line it reads it makes so many exchanges as the line says and prints the seconds they
 * took, and a sum of what it had written and read back. Its blocks live on from line to line, so
 * that a checkpoint in between finds them all and what it does to memory is in the next figure.
 *
 * usage: churn BLOCKS
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static uint64_t state = 88172645463325252u;

static uint64_t next(void)
{
	state ^= state << 13;
	state ^= state >> 7;
	return state ^= state << 17;
}

/* Most blocks are small, a few are large, as in most programs. */
static size_t size(void)
{
	return (size_t)16 << next() % 13 >> (next() % 4 ? 4 : 0) | 16;
}

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

int main(int argc, char **argv)
{
	size_t blocks = argc > 1 ? strtoul(argv[1], NULL, 10) : 0;
	unsigned char **block = calloc(blocks ? blocks : 1, sizeof *block);
	long exchanges;

	if (!blocks || !block)
		return 1;
	while (scanf("%ld", &exchanges) == 1) {
		uint64_t sum = 0;
		double began = now();

		state = 88172645463325252u;
		while (exchanges-- > 0) {
			size_t at = next() % blocks, bytes = size();

			if (block[at])
				sum += block[at][0];
			free(block[at]);
			block[at] = malloc(bytes);
			if (!block[at])
				return 2;
			memset(block[at], (int)(at & 0xff), bytes);
		}
		printf("%.6f %llu\n", now() - began, (unsigned long long)sum);
		fflush(stdout);
	}
	return 0;
}
