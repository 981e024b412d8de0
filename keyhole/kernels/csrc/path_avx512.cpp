#define KEYHOLE_PATH avx512_path
#define KEYHOLE_VECTOR "vector_avx512.h"
#include "path.h"
