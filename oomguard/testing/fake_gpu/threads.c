// How a thread ends while the interpreter goes.
//
// PyTorch's autograd threads may still be dropping the last graph when a short script is over. Python up to 3.13
// ends a thread that asks for the interpreter's lock then by pthread_exit; this unwinds PyTorch's C++ frames, meets
// one that must not throw, and the whole process aborts ("terminate called without an active exception") although
// the script was done. A real card makes this rare, since a script waits for it; here nothing waits. So such a thread
// is left to sleep, which is what Python does from 3.14 on, and the process keeps its true exit status.
// Source: https://github.com/python/cpython/issues/87135
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

static int interpreter_goes(void) {
  int (*ask)(void) = dlsym(RTLD_DEFAULT, "_Py_IsFinalizing");
  if (!ask) ask = dlsym(RTLD_DEFAULT, "Py_IsFinalizing");  // its name from 3.13 on
  return ask && ask();
}

void pthread_exit(void *result) {
  while (interpreter_goes()) pause();
  void (*true_exit)(void *) __attribute__((noreturn)) = dlsym(RTLD_NEXT, "pthread_exit");
  true_exit(result);
}
