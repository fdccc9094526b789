/* A flag of glibc 2.32 that libstdc++ reads. Where it is 0, reference counts are atomic. */
__attribute__((visibility("hidden"))) char __libc_single_threaded;
