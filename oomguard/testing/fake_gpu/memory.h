// What the fake GPU knows of memory: how large its devices are, how full, and whose an address is.
#pragma once
#include <stddef.h>

#define MAX_DEVICES 16
#define GRANULE ((size_t)2 << 20)  // device memory is handed out in whole pages of 2 MiB

typedef enum { DEVICE_MEMORY, HOST_MEMORY, ADDRESSES } Kind;  // ADDRESSES: reserved, to be backed piece by piece

typedef struct {
  char *start;
  size_t bytes;
  Kind kind;
  int device;
  void **backing;  // of ADDRESSES: for each granule, what was mapped there
} Range;

// Hidden: this library is loaded first in every process, and must not stand in for another's function of that name.
#pragma GCC visibility push(hidden)

size_t whole_granules(size_t bytes);

int device_count(void);
size_t capacity_of(int device);
size_t used_of(int device);  // with the context
int take(int device, size_t bytes);  // 1 if it fits and is now counted, 0 if the device is full
void give(int device, size_t bytes);

int new_range(Range *range);  // fills in range->start with fresh pages; 0 if the host has no more addresses
int find_range(const void *address, Range *found);
int end_range(const void *start, Range *ended);  // forgets the range; its pages go back to the host
void own_range(const void *address, int device);  // the device whose memory backs a range of ADDRESSES

#pragma GCC visibility pop
