/* Memory as no allocator here gives it by itself: never at a whole multiple of 64 bytes, to which PyTorch aligns its
   tensors, so that sums are cut elsewhere. `python -m tests.processors` compiles and preloads this. */
#define _GNU_SOURCE
#include <malloc.h>
#include <stdint.h>
#include <stdlib.h>

int posix_memalign(void **found, size_t alignment, size_t size) {
    if (alignment != 64) { /* pages, and what instructions need */
        *found = memalign(alignment, size);
        return *found ? 0 : 12;
    }
    void *first = malloc(size);
    *found = first;
    if (first && (uintptr_t)first % 64 == 0) {
        *found = malloc(size + 16); /* while the first is held, this one lies elsewhere */
        free(first);
    }
    return *found ? 0 : 12;
}
