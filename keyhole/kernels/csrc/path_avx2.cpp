#define KEYHOLE_PATH avx2_path
#define KEYHOLE_VECTOR "vector_avx2.h"
#include "path.h"
