/* The smallest test harness: CHECK fails loudly, main() runs named tests and counts. */
#pragma once

#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(condition)                                                                        \
    do {                                                                                        \
        if (!(condition)) {                                                                     \
            fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);             \
            exit(1);                                                                            \
        }                                                                                       \
    } while (0)

struct Test {
    const char * promise;
    void (*run)();
};

inline int run_all(const std::vector<Test> & tests) {
    for (const Test & test : tests) {
        printf("- %s\n", test.promise);
        fflush(stdout);
        test.run();
    }
    printf("%zu passed, 0 failed\n", tests.size());
    return 0;
}
