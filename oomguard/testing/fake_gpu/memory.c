// The ledger. Device memory is host memory that nothing has touched yet, so it costs the host nothing.
//
//   OOMGUARD_FAKE_GPU_CAPACITY   bytes of each device, separated by commas
//   OOMGUARD_FAKE_GPU_CONTEXT    bytes of each that the process's context takes, in the same order
#define _GNU_SOURCE
#include "memory.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

static struct {
  size_t capacity, used;
} devices[MAX_DEVICES];
static int count;

static Range *ranges;  // some hundreds at most: PyTorch's allocator asks for large segments
static size_t range_count, range_room;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// Before main, so that a script which changes its own environment doesn't change the device.
__attribute__((constructor)) static void read_environment(void) {
  const char *capacity = getenv("OOMGUARD_FAKE_GPU_CAPACITY"), *context = getenv("OOMGUARD_FAKE_GPU_CONTEXT");
  while (capacity && *capacity && count < MAX_DEVICES) {
    char *end;
    devices[count].capacity = strtoull(capacity, &end, 10);
    capacity = *end == ',' ? end + 1 : 0;
    if (context) {
      devices[count].used = strtoull(context, &end, 10);
      context = *end == ',' ? end + 1 : 0;
    }
    count++;
  }
}

size_t whole_granules(size_t bytes) { return (bytes + GRANULE - 1) / GRANULE * GRANULE; }

int device_count(void) { return count; }
size_t capacity_of(int device) { return devices[device].capacity; }

size_t used_of(int device) {
  pthread_mutex_lock(&lock);
  size_t used = devices[device].used;
  pthread_mutex_unlock(&lock);
  return used;
}

int take(int device, size_t bytes) {
  pthread_mutex_lock(&lock);
  int fits = devices[device].used <= devices[device].capacity &&
             bytes <= devices[device].capacity - devices[device].used;
  if (fits) devices[device].used += bytes;
  pthread_mutex_unlock(&lock);
  return fits;
}

void give(int device, size_t bytes) {
  pthread_mutex_lock(&lock);
  devices[device].used -= bytes;
  pthread_mutex_unlock(&lock);
}

int new_range(Range *range) {
  // MAP_NORESERVE: an 80 GiB device on a machine with 8 GiB is what this is for.
  void *start = mmap(0, range->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return 0;
  range->start = start;
  pthread_mutex_lock(&lock);
  if (range_count == range_room) ranges = realloc(ranges, (range_room = 2 * range_room + 256) * sizeof *ranges);
  ranges[range_count++] = *range;
  pthread_mutex_unlock(&lock);
  return 1;
}

static size_t index_of(const void *address) {  // with the lock held; range_count: nobody's
  size_t i = 0;
  while (i < range_count && !((char *)address >= ranges[i].start && (char *)address < ranges[i].start + ranges[i].bytes))
    i++;
  return i;
}

int find_range(const void *address, Range *found) {
  pthread_mutex_lock(&lock);
  size_t i = index_of(address);
  int known = i < range_count;
  if (known) *found = ranges[i];
  pthread_mutex_unlock(&lock);
  return known;
}

int end_range(const void *start, Range *ended) {
  pthread_mutex_lock(&lock);
  size_t i = index_of(start);
  int known = i < range_count && ranges[i].start == start;
  if (known) {
    *ended = ranges[i];
    ranges[i] = ranges[--range_count];
  }
  pthread_mutex_unlock(&lock);
  if (known) munmap(ended->start, ended->bytes);
  return known;
}

void own_range(const void *address, int device) {
  pthread_mutex_lock(&lock);
  size_t i = index_of(address);
  if (i < range_count) ranges[i].device = device;
  pthread_mutex_unlock(&lock);
}
